"""The shipped recipes' networks: classes by data set, and entries of each kind."""

CLASSES = {"linear": None, "digits": 10, "cifar100": 100, "imagenet": 1000}
ENTRIES = [
    "linear", "linear:full-batch", "linear:single-sample", "digits", "cifar100", "cifar100:bs256-amp-nhwc-extra-opts",
    "imagenet", "imagenet:crop176-amp", "synthetic", "synthetic:amp", "synthetic:tiny",
]  # fmt: skip
