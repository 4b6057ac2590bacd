"""stub"""

from bench.figures import write_figures


def write_report(run, folder):
    return [p for f in write_figures(run, folder).values() for p in f]
