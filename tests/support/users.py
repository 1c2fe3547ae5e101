"""Runs functions as another user of the machine; only root can."""

import contextlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

NOBODY, OTHER = 65534, 12345

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="plays other users: run the tests as root")


def become(uid):
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


@contextlib.contextmanager
def user(uid):
    """`run(function, *arguments, **more)` in a process of that user."""
    context = multiprocessing.get_context("fork")  # only what is imported is there: others cannot read root's Python
    with ProcessPoolExecutor(1, context, initializer=become, initargs=(uid,)) as pool:
        yield lambda function, *arguments, **more: pool.submit(function, *arguments, **more).result(60)
