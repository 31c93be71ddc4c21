"""The layer that all clouds of virtual machines share. A cloud implements six calls and states its
traits (`vm.cloud`); from these, the layer implements the provider interface.
"""
