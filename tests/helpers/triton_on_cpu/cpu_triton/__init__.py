"""A backend of Triton named `cpu`, and a plugin of vLLM.

With Triton's interpreter they run the V2 model runner.

vLLM asks only whether an active backend of that name exists. Nothing is compiled: with
TRITON_INTERPRET=1 the kernels run in numpy. The folder beside this package makes it known to both,
as an installed package would be.
"""
