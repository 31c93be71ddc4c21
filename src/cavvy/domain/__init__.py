"""Nouns, units, states and their legal moves; pure, standard library only."""
