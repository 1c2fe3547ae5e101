"""Runs docstrings' examples: `python run_examples.py hvdtrain.torch.models.build`; exit code 1 where one fails."""

import doctest
import importlib
import sys


def main(names: list[str]) -> int:
    """Each name's examples with its module's names at hand, as doctest has them."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder(recurse=False)
    for name in names:
        home, _, attribute = name.rpartition(".")
        module = importlib.import_module(home)
        for test in finder.find(getattr(module, attribute), name, module):
            runner.run(test)
    print(runner.tries, "examples ran")
    return bool(runner.failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
