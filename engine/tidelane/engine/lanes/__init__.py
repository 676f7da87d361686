"""Lanes: how a device can be split between decode and prefill, and the workers that own each part."""
