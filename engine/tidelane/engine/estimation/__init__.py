"""How long steps take, on any part of a device: predicted from a profile or a prior, corrected by what is measured."""
