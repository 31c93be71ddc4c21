"""The layer that clouds of virtual machines share. A cloud supplies six calls and its traits
(`vm.cloud`); the layer keeps the promises of the provider interface on top of them.
"""
