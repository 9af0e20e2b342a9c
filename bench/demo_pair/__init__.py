"""The small real pair: a DSpine drafter for SmolLM2-135M-Instruct, and how it was trained."""
