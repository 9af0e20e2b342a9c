"""The two ratios by which drafting is judged, defined once."""

from __future__ import annotations


def mean_accepted_length(accepted: int, rounds: int) -> float:
    """(accepted + rounds) / rounds: tokens a round, the target's own included; plain is 1.0."""
    return (accepted + rounds) / rounds if rounds else 1.0


def acceptance_rate(accepted: int, drafted: int) -> float:
    """Accepted out of drafted tokens; 0.0 where nothing was drafted."""
    return accepted / drafted if drafted else 0.0
