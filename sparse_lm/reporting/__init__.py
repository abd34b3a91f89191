"""Reports training runs from what they leave in their workdirs."""
