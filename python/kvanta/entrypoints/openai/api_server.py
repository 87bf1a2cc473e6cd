"""`python -m kvanta.entrypoints.openai.api_server`: vLLM's name for `kvanta serve`."""

import sys

from kvanta.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
