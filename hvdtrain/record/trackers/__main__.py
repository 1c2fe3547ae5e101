import sys
from pathlib import Path

from hvdtrain.record.trackers import process

if __name__ == "__main__":
    process.main(sys.argv[1], Path(sys.argv[2]))
