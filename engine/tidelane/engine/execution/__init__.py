"""Executors: what turns a plan into work on a device. One per kind of device, all behind one Protocol."""
