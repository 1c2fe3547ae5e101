"""`python paced.py hvdtrain.FRAMEWORK ARGV` is `python -m hvdtrain.FRAMEWORK ARGV` with a pause in every step.

Many endless runs on few processors so leave them to the runs that still start.
"""

import importlib
import os
import sys
import time

from warm import perform

PAUSE = float(os.environ.get("HVDTRAIN_TEST_PAUSE", "0.05"))  # seconds

if __name__ == "__main__":
    trainer = importlib.import_module(f"{sys.argv[1]}.trainer").Trainer
    update = trainer.update

    def pause_and_update(*given):
        time.sleep(PAUSE)
        update(*given)

    trainer.update = pause_and_update
    perform(["-m", *sys.argv[1:]])
