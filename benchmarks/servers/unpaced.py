# SPDX-License-Identifier: Apache-2.0
"""The command line of forebay, but refusals are told as soon as they can be: so what each costs can be measured."""

from forebay.cli.main import main
from forebay.transports import refusal_pacing

if __name__ == "__main__":
    refusal_pacing.__dict__.update(LEAST_SHARE=1.0, MOST_SHARE=1.0, BURST_S=1e6)
    main()
