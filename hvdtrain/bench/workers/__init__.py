"""Programs that the ranks of a benchmark run, each as `python -m hvdtrain.bench.workers.NAME`."""
