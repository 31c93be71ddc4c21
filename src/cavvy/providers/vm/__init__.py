"""The code that all clouds of virtual machines share. A cloud implements six calls and states its
traits (`vm.cloud`); `VmProvider` implements the provider interface with the calls and traits.
"""
