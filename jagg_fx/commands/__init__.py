"""The subcommands of `python -m jagg_fx`, one a file; each has `add_arguments(parser)` and `main(arguments) -> exit code`."""
