"""State in, plan out. Pure: no torch, no clock, no I/O, so that the same code runs live and in virtual time."""
