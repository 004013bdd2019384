"""The processes of a launch, and the parts that `torch.compile` compiles in each process."""
