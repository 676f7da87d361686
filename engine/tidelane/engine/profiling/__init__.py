"""Measuring a profile: which passes to time, timing them on an executor, and what comes of it.

Only `machine` and `verdict` need torch or numpy. The rest drives any executor, so that a virtual one can test it.
"""
