// What the command-line programs do once they know that the draft model is a DSpine drafter.
#pragma once

struct common_params;

// Sets what was not given: the type, the depth (block size - 1), one slot where the count is automatic, and asks
// the loader to keep the target's head rows readable. Clamps and logs a depth past the block.
// Call after downloads and before the target is loaded. Does nothing without a DSpine drafter.
// Throws std::invalid_argument for a flag that contradicts the file.
void dspine_resolve_params(common_params & params);

// Gives the draft context its own batch sizes: --spec-draft-ubatch, for a DSpine drafter 128 when not
// given, and never less than one whole draft batch of all slots.
void dspine_size_draft_batch(const common_params & params, common_params & draft);
