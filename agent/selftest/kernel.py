"""The one kernel of the self-test: it copies 8-byte words with loads and stores of the multiprocessors."""

NAME = b"p2p_copy"
BLOCKS, THREADS = 512, 256

# .volatile: every word is really loaded from and stored to where it says, not to a cache line of this GPU's.
# PTX of this version and target is what every driver takes that still knows Turing; the driver compiles it.
PTX = b"""\
.version 6.3
.target sm_75
.address_size 64

.visible .entry p2p_copy(.param .u64 destination, .param .u64 source, .param .u64 words)
{
    .reg .pred %done;
    .reg .b32  %block, %threads, %thread, %blocks;
    .reg .b64  %to, %from, %count, %i, %own, %step, %offset, %at, %word;

    ld.param.u64 %to, [destination];
    ld.param.u64 %from, [source];
    ld.param.u64 %count, [words];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %i, %block, %threads;
    cvt.u64.u32 %own, %thread;
    add.u64 %i, %i, %own;
    mul.wide.u32 %step, %threads, %blocks;
again:
    setp.ge.u64 %done, %i, %count;
    @%done bra end;
    shl.b64 %offset, %i, 3;
    add.u64 %at, %from, %offset;
    ld.volatile.global.u64 %word, [%at];
    add.u64 %at, %to, %offset;
    st.volatile.global.u64 [%at], %word;
    add.u64 %i, %i, %step;
    bra again;
end:
    ret;
}
\0"""
