"""`python -m hvdtrain predict`: time, throughput and efficiency on N ranks, and how sure that is."""

import json
import textwrap
from collections.abc import Sequence

from hvdtrain.core import flags
from hvdtrain.terminal import Status
from hvdtrain.tools.predict import report
from hvdtrain.tools.predict.task import Options, task_of

WIDTH = 80
PROG = "python -m hvdtrain predict"


def main(argv: Sequence[str]) -> int:
    """Prints the forecast. Raises RecipeError, OutputError, EngineUnavailable."""
    options: Options = flags.parse(Options, PROG, argv)
    with Status("fitting the model of a step"):
        task = task_of(options)
        forecast = task.model.forecast(task.ranks)
        if options.json:
            lines = [json.dumps(report.to_json(task, forecast))]
        else:
            remarks = [line for text in report.remarks(task, forecast) for line in textwrap.wrap(text, WIDTH)]
            lines = [*report.table(task, forecast), "", *remarks]
    print("\n".join(lines))
    if options.picture:
        from hvdtrain.tools.bench.measure import plot

        plot(lambda axes: report.draw(axes, task), options.picture)
    return 0
