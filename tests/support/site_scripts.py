"""The example scripts in slurm/: for each site, those of which launchers."""

from hvdtrain.tools.slurm.sites import SITES

EVERY, SRUN = ("srun", "torchrun", "tf-config"), ("srun",)
USUAL = ("srun", "torchrun")
OF_SITE = dict.fromkeys(("capella", "alpha", "generic"), EVERY) | dict.fromkeys(
    ("piz-daint", "jean-zay", "jean-zay-gpu-p2", "perlmutter", "cori-gpu"), SRUN
)
SCRIPTS = [(name, launcher) for name in SITES for launcher in OF_SITE.get(name, USUAL)]
