import sys

from tidelane.engine.http.front import main

main(sys.argv[1:])
