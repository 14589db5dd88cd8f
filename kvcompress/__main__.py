"""`python -m kvcompress`: the `kvcompress` command."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="kvcompress")
