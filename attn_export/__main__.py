"""`python -m attn_export`: the same as the `attn-export` script."""

from attn_export.cli.main import main

main()
