"""Demonstrations and measurements of dspine."""
