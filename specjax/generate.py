"""`specjax generate`; see `specjax.cli.generate`."""

from specjax.cli.generate import run_as_program

if __name__ == "__main__":
    run_as_program()
