"""``python -m tools.checkpoint_convert import | export | verify | inspect``: the same as ``megarl convert``."""

from megarl.convert.cli import app

if __name__ == "__main__":
    app(prog_name="checkpoint_convert")
