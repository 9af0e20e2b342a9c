// What the command-line programs do once they know that the draft model is a DSpine drafter.
#pragma once

#include <cstdint>
#include <string>

struct common_params;
struct llama_context;

// Sets what was not given: the type, the depth (block size - 1), one slot where the count is automatic, and asks
// the loader to keep the target's head rows readable. Clamps and logs a depth past the block.
// Call after downloads and before the target is loaded. Does nothing without a DSpine drafter.
// Throws std::invalid_argument for a flag that contradicts the file.
void dspine_resolve_params(common_params & params);

// One slot where the slot count was left to the server and the draft model is a local DSpine drafter; a drafter
// that is still to be downloaded is noted for dspine_resolve_params.
void dspine_auto_slots(common_params & params);

// A saved slot has the drafter's rows in a second file, `path`.draft. Without it, restoring clears
// them: rows of another prompt would cost acceptance without a word.
void dspine_save_slot(llama_context * ctx_dft, const std::string & path, int32_t seq);
void dspine_restore_slot(llama_context * ctx_dft, const std::string & path, int32_t seq);

// Gives the draft context its own batch sizes: --spec-draft-ubatch, for a DSpine drafter 128 when not
// given, and never less than one whole draft batch of all slots.
void dspine_size_draft_batch(const common_params & params, common_params & draft);
