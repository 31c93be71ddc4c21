"""The providers of GPUs. Each provider is a module or package that implements the interface in
`base`."""
