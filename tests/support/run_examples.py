"""Runs the examples in docstrings: `python run_examples.py hvdtrain.torch.models.build`. Exit code 1 if one fails."""

import doctest
import importlib
import sys


def main(names: list[str]) -> int:
    """Runs each name's examples with the names of its module, as doctest does."""
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
