import sys

import torch

sys.path.insert(0,".")
import torch.nn.functional as F

from guardbit.kernels import backward, forward, tiles
from guardbit.kernels.reference import Dropout


def bench(f,n=20):
    for _ in range(3): f()
    ev=[(torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a,b in ev: a.record(); f(); b.record()
    torch.cuda.synchronize(); return sorted(a.elapsed_time(b) for a,b in ev)[n//2]
orig=tiles.Tile.for_dropout
word=torch.empty((),dtype=torch.int64,device="cuda").random_()
for B,H,N,D in ((32,12,1024,64),(32,16,1024,128)):
    q,k,v,d=[torch.randn(B,H,N,D,device="cuda",dtype=torch.bfloat16) for _ in range(4)]
    dr=Dropout(0.1,word,tuple(range(H)),H)
    for label,drop,fd in (("off",None,None),("stages-1",dr,lambda t:t._replace(stages=max(1,t.stages-1))),("same",dr,lambda t:t),
                          ("128x64/8w2" ,dr,lambda t:t._replace(stages=2,warps=8)),("64x32",dr,lambda t:t._replace(rows=64 ,keys=32,stages=2)) ,("32x64",dr,lambda t:t._replace(rows=32,keys=64,stages=2))):
        if fd: tiles.Tile.for_dropout=property(fd)
        try:
            kw=dict(causal=True,scale=D**-.5,stabilizers=("none",)*H,dropout=drop)
            r=forward.forward(q,k,v,**kw)
            tf=bench(lambda: forward.forward(q,k,v,**kw))
            tb=bench(lambda: backward.backward(d,q,k,v,r.out,r.lse,None,**kw))
            print(B,H,N,D,label,f"fwd {tf:.3f} bwd {tb:.3f}",flush=True)
        except Exception as e: print(B,H,N,D,label,repr(e)[:150],flush=True)
    tiles.Tile.for_dropout=orig
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for be in (SDPBackend.FLASH_ATTENTION,SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(be):
            for p in (0.0,0.1):
                l=[x.detach().requires_grad_() for x in (q,k,v)]
                tf=bench(lambda: F.scaled_dot_product_attention(*[x.detach() for x in l],dropout_p=p,is_causal=True))
                o=F.scaled_dot_product_attention(*l,dropout_p=p,is_causal=True)
                tb=bench(lambda: torch.autograd.grad(o,l,d,retain_graph=True))
                print(B,H,N,D,be.name,p,f"fwd {tf:.3f} bwd {tb:.3f}",flush=True)
# host time
import time

from guardbit.kernels import switchboard
from guardbit.kernels.attention import switchable_attention

q,k,v,d=[torch.randn(1,12,64,64,device="cuda",dtype=torch.bfloat16) for _ in range(4)]
l=[x.requires_grad_() for x in (q,k,v)]
n=switchboard.add_site(); site=torch.tensor(n)
def host(f,m=300):
    for _ in range(50): f()
    torch.cuda.synchronize(); best=1e9
    for _ in range(5):
        s=time.perf_counter()
        for _ in range(m): f()
        best=min(best,(time.perf_counter()-s)/m); torch.cuda.synchronize()
    return best*1e6
def fb(f):
    return (lambda: torch.autograd.grad(f(),l,d))
def sd():
    return F.scaled_dot_product_attention(*l,is_causal=True)
def sw():
    return switchable_attention(*l,site,is_causal=True,scale=None)
print("host us sdpa",f"{host(sd):.0f} {host(fb(sd)):.0f}")
print("host us site, stock",f"{host(sw):.0f} {host(fb(sw)):.0f}")
for names in (("none",)*11+("compensated",),("compensated",)*12,):
    switchboard.site_state(n).stabilizers=names
    print("host us site,",names[0],f"{host(sw):.0f} {host(fb(sw)):.0f}")
