"""Train from a checkout: `accelerate launch train.py ...` or `python train.py --config run.toml`."""

import sys

from finetrainers.cli.main import train_command
from finetrainers.utils.exit_in_time import exit_in_time

if __name__ == "__main__":
    sys.exit(exit_in_time(lambda: train_command(sys.argv[1:], prog="train.py")))
