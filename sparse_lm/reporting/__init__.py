"""Pictures of training runs, from what they leave in their workdirs."""
