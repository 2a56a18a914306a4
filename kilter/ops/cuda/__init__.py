"""The CUDA side of `kilter.ops`, in Triton: same names, same arguments, forward only.

    linear.py      linear, gated_linear, linear_grad_input
    attention.py   attention            paged or packed, causal, grouped queries, sliding window
    rope.py        rope_qkv             qk-norm + rotation + write into the cache
    norm.py        rms_norm
    activation.py  gated_activation
    embedding.py   embed
    logprob.py     log_softmax, token_logprobs, argmax

Every op is row-invariant: a row's bits depend only on that row's inputs. Three rules make it so.
*One order*: a sum's order is fixed by constants and by the row's own length, never by how many
rows there are. *No contraction*: kernels are compiled without fusing a product into a following
sum, so two forms of a kernel (masked or not, split or not) round alike. *No specialising on the
number of rows*: Triton recompiles for arguments that are 1 or divisible by 16, and another
compilation may lay out a reduction otherwise; row counts and tensor addresses are kept out of it.

Kernels compile on first use, so importing this package needs neither Triton nor a GPU. With
``TRITON_INTERPRET=1`` in the environment before the import they run on CPU tensors, slowly.
"""
