"""The command line: one module for each subcommand, which imports its part of Tidelane only when it is called.

Belongs here: flags, exit codes, what people read in a terminal. Each module has `register(subparsers)`, which adds its
parser, and `run(args)`, which returns the exit code.
"""
