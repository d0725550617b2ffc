import sys, itertools
sys.path.insert(0,"/work/main/tests")
import torch, flexrank as fr
from tiny import build, elastic, chain_of, with_sizes
import inspect, tiny
print(inspect.getsource(chain_of)); print(inspect.getsource(elastic)); print(inspect.getsource(with_sizes))
