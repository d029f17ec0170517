"""Train from a checkout: `accelerate launch train.py ...` or `python train.py --config run.toml`."""

import sys

from finetrainers.cli.main import train_command

if __name__ == "__main__":
    sys.exit(train_command(sys.argv[1:], prog="train.py"))
