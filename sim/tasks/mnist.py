"""MNIST, FashionMNIST and EMNIST Balanced: grey images of 28x28 pixels."""

from __future__ import annotations

from typing import ClassVar

from fedreuse.client.task import TaskContext
from fedreuse.sim.tasks.idx_files import Source, load, one_archive, single_files
from fedreuse.sim.tasks.images import ImageTask

PARTS = {"train": "train", "test": "t10k"}
MNIST_SOURCE = Source(
    name="MNIST",
    terms="(c) Yann LeCun and Corinna Cortes, CC BY-SA 3.0",
    size=11_594_722,
    classes=10,
    train=60_000,
    test=10_000,
    md5={
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    origins=single_files,
    parts=PARTS,
)
FASHION_SOURCE = Source(
    name="FashionMNIST",
    terms="(c) Zalando SE, MIT licence",
    size=30_878_645,
    classes=10,
    train=60_000,
    test=10_000,
    md5={
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    origins=single_files,
    parts=PARTS,
)
BALANCED = {"train": "emnist-balanced-train", "test": "emnist-balanced-test"}
EMNIST_SOURCE = Source(
    name="EMNIST",
    terms="NIST Special Database 19, work of the US government; a citation of Cohen et al., 2017, is asked for",
    size=561_753_746,
    classes=47,
    train=112_800,
    test=18_800,
    md5={
        f"{begin}-{what}-ubyte": None
        for begin in BALANCED.values()
        for what in ("images-idx3", "labels-idx1")
    },
    origins=one_archive,
    parts=BALANCED,
    transposed=True,
)


class MNIST(ImageTask):
    """Handwritten digits, 28x28 (LeCun et al., 1998): 60,000 images to train on, 10,000 to test on."""

    source: ClassVar[Source] = MNIST_SOURCE

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context, *load(self.source, context.data), classes=self.source.classes)


class FashionMNIST(MNIST):
    """Articles of clothing, 28x28 (Xiao et al., 2017): 60,000 images to train on, 10,000 to test on."""

    source = FASHION_SOURCE


class EmnistBalanced(MNIST):
    """Handwritten digits and letters, 28x28, as many of each of 47 classes (Cohen et al., 2017).

    112,800 images to train on, 18,800 to test on. Capital and small letters that look alike share a class.
    """

    source = EMNIST_SOURCE
