"""The processes of a launch, and what `torch.compile` compiles in each."""
