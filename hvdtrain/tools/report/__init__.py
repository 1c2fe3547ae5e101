"""`python -m hvdtrain report RUN [RUN ...]`: one file that says what a run was worth."""
