"""What HTTP costs the decode step: the real server with 64 open streams, against the loop alone."""
