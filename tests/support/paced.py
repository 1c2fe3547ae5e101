"""`python paced.py hvdtrain.FRAMEWORK ARGV`: `python -m hvdtrain.FRAMEWORK ARGV` that rests in every step, so that many
endless runs on few processors leave them to those that still start."""

import importlib
import runpy
import sys
import time

REST = 0.05  # seconds

if __name__ == "__main__":
    sys.argv[:] = sys.argv[1:]
    trainer = importlib.import_module(f"{sys.argv[0]}.trainer").Trainer
    update = trainer.update

    def rest_and_update(*given):
        time.sleep(REST)
        update(*given)

    trainer.update = rest_and_update
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
