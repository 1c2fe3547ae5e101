"""Programs that the ranks of a benchmark run, each as `python -m hvdtrain.tools.bench.workers.NAME`."""
