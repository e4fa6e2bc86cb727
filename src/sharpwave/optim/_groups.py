"""What both optimizers take from torch.optim in another form."""

from torch.optim import Optimizer

# PyTorch keeps its compiler out of this method, and imports the compiler to do so: seconds that an agent which only
# plays would wait for. Nothing here is compiled.
add_param_group = getattr(Optimizer.add_param_group, "__wrapped__", Optimizer.add_param_group)
