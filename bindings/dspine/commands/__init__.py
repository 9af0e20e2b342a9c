"""The commands of `dspine`, one module each."""
