"""Pure functions on tensors: the scans, trees and losses everything else is made of."""
