"""What `perdure run` does when its flow process died and no other follows: close what that one left open in Prefect."""

import argparse
import sys

from perdure.training.config import load_config


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    from prefect.client.orchestration import get_client

    from perdure.tasks.close_rows import close_dead

    config = load_config(options.config, options.set)
    with get_client(sync_client=True) as client:
        close_dead(client, config.directory, config=options.config, overrides=options.set)
    return 0


if __name__ == "__main__":
    sys.exit(main())
