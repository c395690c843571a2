"""Your own images: any file with MedMNIST's keys, named `npz:FILE`."""

from __future__ import annotations

from pathlib import Path

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.tasks.images import ImageTask
from fedreuse.sim.tasks.npz_files import read

FORM = (
    "write it with numpy.savez_compressed(FILE, train_images=, train_labels=, test_images=, test_labels=) and, for a "
    "validation set of its own, val_images= and val_labels=; images are uint8 (n, h, h) or (n, h, h, 3), labels whole "
    "numbers from 0, (n,) or (n, 1)"
)


class NpzImages(ImageTask):
    """The images of a file, looked for from the working directory, then in the folder with data sets.

    If the file has validation images, nothing is cut from the clients' images.
    """

    argument = "FILE"

    def __init__(self, context: TaskContext) -> None:
        path = _found(context)
        train, validation, test, classes = read(path, FORM)
        super().__init__(context, train, test, classes, validation)


def _found(context: TaskContext) -> Path:
    places = [Path(context.argument).absolute(), (context.data / context.argument).absolute()]
    for path in places:
        if path.exists():
            return path
    raise TaskError(
        f"npz:{context.argument}: there is no file {' or '.join(map(str, dict.fromkeys(places)))}; name it from the "
        "working directory or from the folder given with --data FOLDER"
    )
