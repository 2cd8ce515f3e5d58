#include "ptx/opcodes.h"

namespace fajit::emulator {

// Decode functions of the rows, one for each opcode or family.
using Decode = void(Decoder& d);
Decode decode_add, decode_sub, decode_mul, decode_mad, decode_div, decode_rem, decode_abs,
    decode_neg, decode_min, decode_max, decode_and, decode_or, decode_xor, decode_not, decode_shl,
    decode_shr, decode_shf, decode_bfe, decode_bfi, decode_bfind, decode_brev, decode_popc,
    decode_clz, decode_prmt, decode_lop3, decode_fma, decode_copysign, decode_rcp, decode_sqrt,
    decode_rsqrt, decode_sin, decode_cos, decode_lg2, decode_ex2, decode_tanh, decode_setp,
    decode_selp, decode_slct, decode_cvt, decode_mov, decode_cvta, decode_ld, decode_st,
    decode_atom, decode_red, decode_nothing, decode_fence, decode_mbarrier, decode_createpolicy,
    decode_cp, decode_mma, decode_ldmatrix, decode_stmatrix, decode_wgmma, decode_setmaxnreg,
    decode_shfl, decode_vote, decode_redux, decode_activemask, decode_bra, decode_brx, decode_exit,
    decode_trap, decode_bar, decode_elect, decode_griddepcontrol;

// clang-format off
// Cases: operands have the last type of the mnemonic, results the first, unless a type precedes the
// value; 0x.. are bits, #.. a literal in the instruction. `test: name` is in tests/emulator.
const std::vector<OpcodeRow>& opcode_table() {
  static const std::vector<OpcodeRow> rows = {
      {"add", "s/u 16-64, f32 f64", decode_add, "d = a + b; .sat .ftz .rz .rm .rp",
       "add.s32 5 -7 = -2; add.sat.s32 2147483647 1 = 2147483647; add.u16 65535 2 = 1; add.s64 -1 "
       "1 = 0; add.f32 1.5 2.25 = 3.75; add.rz.f32 1 0.99999994 = 1.9999999; add.sat.f32 0.75 0.5 "
       "= 1; add.f64 0.1 0.2 = 0.30000000000000004; add.ftz.f32 0x00000001 0x00000001 = "
       "0x00000000; add.f32 0x7f800000 0xff800000 = 0x7fffffff"},
      {"sub", "s/u 16-64, f32 f64", decode_sub, "d = a - b",
       "sub.s32 -2147483648 1 = 2147483647; sub.sat.s32 -2147483648 1 = -2147483648; sub.s64 3 5 = "
       "-2; sub.f32 1 0.75 = 0.25; sub.rp.f32 1 0x00000001 = 1; sub.rm.f32 1 0x00000001 = "
       "0.99999994"},
      {"mul", "s/u 16-64, f32 f64", decode_mul,
       "the low or high half of a b, or all of it (.wide); a b",
       "mul.lo.s32 -3 7 = -21; mul.hi.u32 4294967295 4294967295 = 4294967294; mul.hi.s32 -1 1 = "
       "-1; mul.wide.s32 -2 3 = s64:-6; mul.wide.u16 65535 65535 = u32:4294836225; mul.hi.u64 "
       "0xffffffffffffffff 16 = 15; mul.lo.s64 -4 5 = -20; mul.lo.s16 300 300 = 24464; mul.f32 1.5 "
       "-2 = -3; mul.ftz.f32 0x00800000 0.5 = 0; mul.f64 1e200 1e-100 = 1e100"},
      {"mad", "s/u 16-64, f32 f64", decode_mad, "mul and add; of floats, fma",
       "mad.lo.s32 3 4 5 = 17; mad.wide.s32 -3 4 s64:5 = s64:-7; mad.hi.u32 0x80000000 4 1 = 3; "
       "mad.lo.s64 -3 4 5 = -7; mad.rn.f32 2 3 4 = 10"},
      {"fma", "f32 f64 f16x2 bf16x2", decode_fma, "a b + c, rounded once; .ftz .sat .rz .rm .rp",
       "fma.rn.f32 0x3f800001 0x3f800001 0xbf800002 = 0x28800000; fma.rn.f64 2 3 0.5 = 6.5; "
       "fma.rm.f32 1 1 0x00000001 = 1; fma.rp.f32 1 1 0x00000001 = 0x3f800001; fma.rn.sat.f32 2 3 "
       "4 = 1; fma.rn.f16x2 0x64ff6400 0x3c003c00 0xe480e480 = 0x57f0d800; fma.rn.bf16x2 "
       "0x437f4300 0x3f803f80 0xc300c380 = 0x42fec300"},
      {"div", "s/u 16-64, f32 f64", decode_div,
       "quotient; .approx and .full are rounded correctly too",
       "div.s32 -7 2 = -3; div.u32 4294967289 2 = 2147483644; div.s64 -9 4 = -2; div.s32 "
       "-2147483648 -1 = -2147483648; div.u32 5 0 = 4294967295; div.rn.f32 1 3 = 0x3eaaaaab; "
       "div.full.f32 1 4 = 0.25; div.rn.f64 1 3 = 0.3333333333333333; div.rz.f32 2 3 = 0x3f2aaaaa"},
      {"rem", "s/u 16-64", decode_rem, "remainder with the sign of a",
       "rem.s32 -7 2 = -1; rem.u32 7 4 = 3; rem.s64 -9 4 = -1; rem.s32 -2147483648 -1 = 0"},
      {"abs", "s 16-64, f32 f64", decode_abs, "|a|",
       "abs.s32 -5 = 5; abs.s64 -7 = 7; abs.f32 -1.5 = 1.5; abs.f64 -2 = 2; abs.ftz.f32 0x80000001 "
       "= 0"},
      {"neg", "s 16-64, f32 f64", decode_neg, "-a",
       "neg.s32 5 = -5; neg.s64 -7 = 7; neg.f32 0 = 0x80000000; neg.f64 2 = -2"},
      {"min", "s/u 16-64, f32 f64", decode_min,
       "the lesser; of a number and NaN the number, .NaN: NaN; three operands",
       "min.s32 -1 1 = -1; min.u32 4294967295 1 = 1; min.s64 -5 3 = -5; min.f32 0x7fc00000 2 = 2; "
       "min.NaN.f32 0x7fc00000 2 = 0x7fffffff; min.f32 0x80000000 0 = 0x80000000; min.f64 1 -1 = "
       "-1; min.f32 3 1 2 = 1"},
      {"max", "s/u 16-64, f32 f64", decode_max, "the greater; as min",
       "max.s32 -1 1 = 1; max.u32 4294967295 1 = 4294967295; max.s64 -5 3 = 3; max.f32 0x7fc00000 "
       "2 = 2; max.NaN.f32 2 0x7fc00000 = 0x7fffffff; max.f32 0x80000000 0 = 0; max.f64 1 -1 = 1; "
       "max.f32 1 3 2 = 3"},
      {"copysign", "f32 f64", decode_copysign, "the size of b with the sign of a",
       "copysign.f32 -0.0 3 = -3; copysign.f64 1 -2 = 2"},
      {"rcp", "f32 f64", decode_rcp, "1 / a, rounded correctly; .approx.ftz.f64: of the upper word",
       "rcp.rn.f32 3 = 0x3eaaaaab; rcp.approx.ftz.f32 4 = 0.25; rcp.approx.ftz.f32 0 = 0x7f800000; "
       "rcp.rn.f64 8 = 0.125; rcp.approx.ftz.f64 4 = 0.25"},
      {"sqrt", "f32 f64", decode_sqrt, "square root, rounded correctly",
       "sqrt.rn.f32 2 = 0x3fb504f3; sqrt.approx.ftz.f32 9 = 3; sqrt.rn.f64 2 = 1.4142135623730951; "
       "sqrt.rn.f32 -1 = 0x7fffffff"},
      {"rsqrt", "f32 f64", decode_rsqrt, "1 / sqrt(a)",
       "rsqrt.approx.ftz.f32 4 = 0.5; rsqrt.approx.f32 0 = 0x7f800000; rsqrt.approx.f64 16 = 0.25"},
      {"sin", "f32", decode_sin, "sine", "sin.approx.f32 0 = 0; sin.approx.ftz.f32 1 = 0x3f576aa4"},
      {"cos", "f32", decode_cos, "cosine",
       "cos.approx.f32 0 = 1; cos.approx.ftz.f32 1 = 0x3f0a5140"},
      {"lg2", "f32", decode_lg2, "base-2 logarithm",
       "lg2.approx.ftz.f32 8 = 3; lg2.approx.f32 0 = 0xff800000; lg2.approx.f32 -1 = 0x7fffffff"},
      {"ex2", "f32", decode_ex2, "2^a; .ftz flushes subnormal results",
       "ex2.approx.ftz.f32 -2 = 0.25; ex2.approx.ftz.f32 0xff800000 = 0; ex2.approx.ftz.f32 -127 = "
       "0; ex2.approx.f32 -127 = 0x00400000"},
      {"tanh", "f32", decode_tanh, "hyperbolic tangent, rounded to 11 bits",
       "tanh.approx.f32 0 = 0; tanh.approx.f32 20 = 1; tanh.approx.f32 0.5 = 0x3eeca000; "
       "tanh.approx.f32 -0.5 = 0xbeeca000; tanh.approx.f32 -0.0 = 0x80000000; tanh.approx.f32 "
       "0xff800000 = -1; tanh.approx.f32 0x7fc00000 = 0x7fffffff"},
      {"and", "pred b16-64", decode_and, "a & b",
       "and.b32 12 10 = 8; and.b64 0xff00ff00ff00ff00 0xffff0000ffff0000 = 0xff000000ff000000; "
       "and.b16 12 10 = 8; and.pred 1 0 = 0"},
      {"or", "pred b16-64", decode_or, "a | b",
       "or.b32 12 10 = 14; or.b64 1 2 = 3; or.b16 12 10 = 14; or.pred 1 0 = 1"},
      {"xor", "pred b16-64", decode_xor, "a ^ b",
       "xor.b32 12 10 = 6; xor.b64 1 3 = 2; xor.b16 12 10 = 6; xor.pred 1 1 = 0"},
      {"not", "pred b16-64", decode_not, "~a",
       "not.b32 0 = 4294967295; not.b64 0 = 0xffffffffffffffff; not.b16 1 = 65534; not.pred 1 = 0"},
      {"shl", "b16-64", decode_shl, "a << n; n of the width or more gives 0",
       "shl.b32 1 u32:31 = 0x80000000; shl.b32 1 u32:32 = 0; shl.b64 1 u32:40 = 0x10000000000; "
       "shl.b16 1 u32:15 = 32768"},
      {"shr", "b/s/u 16-64", decode_shr, "a >> n; signed ones keep the sign",
       "shr.u32 0x80000000 u32:31 = 1; shr.s32 -8 u32:1 = -4; shr.s32 -8 u32:99 = -1; shr.s64 -8 "
       "u32:2 = -2; shr.u64 0x10000000000 u32:40 = 1; shr.u32 5 u32:32 = 0"},
      {"shf", "b32", decode_shf, "a word of the pair b:a, shifted .l or .r; .wrap .clamp",
       "shf.l.wrap.b32 0x80000001 0x00000001 u32:1 = 3; shf.r.wrap.b32 0x80000001 3 u32:33 = "
       "0xc0000000; shf.l.clamp.b32 7 9 u32:40 = 7; shf.r.clamp.b32 7 9 u32:40 = 9"},
      {"bfe", "s/u 32 64", decode_bfe, "a bit field, extended",
       "bfe.u32 0xabcd1234 u32:8 u32:8 = 0x12; bfe.s32 0x00008000 u32:8 u32:8 = -128; bfe.u64 "
       "0xff00000000 u32:32 u32:8 = 255; bfe.s32 -1 u32:0 u32:0 = 0; bfe.s32 0x80000000 u32:28 "
       "u32:8 = -8"},
      {"bfi", "b32 b64", decode_bfi, "a put into a bit field of b",
       "bfi.b32 0xff 0 u32:4 u32:8 = 0xff0; bfi.b64 1 0 u32:40 u32:1 = 0x10000000000; bfi.b32 0xf "
       "0xaaaaaaaa u32:32 u32:4 = 0xaaaaaaaa"},
      {"bfind", "s/u 32 64", decode_bfind,
       "position of the highest 1 (of negatives: 0), or all ones; .shiftamt",
       "bfind.u32 256 = u32:8; bfind.s32 -1 = u32:4294967295; bfind.shiftamt.u32 1 = u32:31; "
       "bfind.u64 0x10000000000 = u32:40; bfind.s32 -256 = u32:7"},
      {"brev", "b32 b64", decode_brev, "bits reversed",
       "brev.b32 1 = 0x80000000; brev.b64 1 = 0x8000000000000000"},
      {"popc", "b32 b64", decode_popc, "number of ones",
       "popc.b32 255 = u32:8; popc.b64 0xffffffff00000001 = u32:33"},
      {"clz", "b32 b64", decode_clz, "leading zeros",
       "clz.b32 1 = u32:31; clz.b32 0 = u32:32; clz.b64 1 = u32:63"},
      {"prmt", "b32", decode_prmt, "bytes of b:a picked by nibbles of c; 8: their sign",
       "prmt.b32 0x33221100 0x77665544 0x7520 = 0x77552200; prmt.b32 0x000000ff 0 0x0008 = "
       "0xffffffff; prmt.b32 0x80 0 0x9998 = 0x000000ff"},
      {"lop3", "b32", decode_lop3, "the three-input function of a table",
       "lop3.b32 0xf0f0f0f0 0xcccccccc 0xaaaaaaaa #0xe8 = 0xe8e8e8e8; lop3.b32 0xf0f0f0f0 "
       "0xcccccccc 0xaaaaaaaa #0x96 = 0x96969696"},
      {"setp", "b/s/u 16-64, f32 f64", decode_setp,
       "p = a cmp b, combined with a predicate; p|q: and its complement",
       "setp.lt.s32 -1 1 = pred:1; setp.lt.u32 0xffffffff 1 = pred:0; setp.lo.u32 1 2 = pred:1; "
       "setp.ne.f32 0x7fc00000 1 = pred:0; setp.neu.f32 0x7fc00000 1 = pred:1; setp.nan.f32 1 "
       "0x7fc00000 = pred:1; setp.num.f32 1 2 = pred:1; setp.ge.and.s32 2 1 pred:0 = pred:0; "
       "setp.eq.or.s64 1 2 pred:1 = pred:1; setp.gt.xor.f64 2 1 pred:1 = pred:0; setp.ltu.f32 1 "
       "0x7fc00000 = pred:1; setp.hs.u32 2 2 = pred:1; setp.eq.s16 -1 -1 = pred:1"},
      {"selp", "b/s/u 16-64, f32 f64", decode_selp, "p ? a : b",
       "selp.b32 7 8 pred:1 = 7; selp.f64 1.5 2.5 pred:0 = 2.5; selp.b16 7 8 pred:0 = 8; selp.b64 "
       "1 2 pred:1 = 1"},
      {"slct", "b/s/u 16-64, f32 f64", decode_slct, "c >= 0 ? a : b",
       "slct.s32.s32 7 8 -1 = 8; slct.f32.f32 f32:1 f32:2 -0.0 = 1; slct.u64.s32 u64:7 u64:8 0 = "
       "7; slct.s32.f32 s32:7 s32:8 0x7fc00000 = 8"},
      {"cvt", "s/u 8-64, f16 bf16 f32 f64, f16x2 bf16x2 from two f32", decode_cvt,
       "conversion; .rn .rz .rm .rp .rni .rzi .rmi .rpi .sat .relu .ftz",
       "cvt.s64.s32 -5 = -5; cvt.u32.u64 0x100000007 = 7; cvt.s32.s8 s32:0xfe = -2; cvt.u16.u32 "
       "65537 = 1; cvt.sat.u8.s32 300 = u32:255; cvt.rn.f32.s32 16777217 = 16777216; "
       "cvt.rp.f32.s32 16777217 = 16777218; cvt.rzi.s32.f32 -1.75 = -1; cvt.rni.s32.f32 2.5 = 2; "
       "cvt.rmi.s64.f64 -1.5 = -2; cvt.rpi.f32.f32 1.25 = 2; cvt.rzi.u32.f32 -5 = 0; "
       "cvt.rzi.s32.f32 1e20 = 2147483647; cvt.rzi.s32.f32 0x7fc00000 = 0; cvt.rzi.s64.f32 "
       "0x7fc00000 = -9223372036854775808; cvt.rn.f16.f32 65520 = 0x7c00; cvt.rz.f16.f32 65520 = "
       "0x7bff; cvt.rn.f16.f32 0x33000000 = 0x0000; cvt.rn.f16.f32 0x33000001 = 0x0001; "
       "cvt.f32.f16 0x0001 = 0x33800000; cvt.f32.bf16 0x3fc0 = 1.5; cvt.rn.bf16.f32 0x3f808000 = "
       "0x3f80; cvt.rn.bf16.f32 0x3f818000 = 0x3f82; cvt.rz.bf16.f32 0x3f81ffff = 0x3f81; "
       "cvt.rn.bf16x2.f32 1 2 = 0x3f804000; cvt.rn.f16x2.f32 1 2 = 0x3c004000; cvt.rz.f16x2.f32 "
       "65520 1 = 0x7bff3c00; cvt.rn.relu.bf16x2.f32 -1 2 = 0x00004000; cvt.rn.f32.f64 0.1 = "
       "0x3dcccccd; cvt.f64.f32 1.5 = 1.5; cvt.sat.f32.f32 1.5 = 1; cvt.sat.f32.f32 0x7fc00000 = "
       "0; cvt.rn.f64.s64 -3 = -3; cvt.ftz.f64.f32 0x00000001 = 0; cvt.rn.bf16.s64 "
       "4629700416936869889 = 0x5e81; cvt.rn.bf16.s64 -4629700416936869889 = 0xde81; "
       "cvt.rn.bf16.u64 4629700416936869888 = 0x5e80; cvt.rp.bf16.u64 4611686018427387905 = "
       "0x5e81"},
      {"mov", "pred b/s/u 16-64, f32 f64", decode_mov,
       "copies; {a, b}: packs or unpacks; names give addresses",
       "mov.b32 5 = 5; mov.f64 1.5 = 1.5; mov.pred 1 = 1; mov.b64 {b32:1,b32:2} = 0x200000001; "
       "mov.b32 {b16:1,b16:2} = 0x20001; mov.b64 0x200000001 = {b32:1,b32:2}; mov.b32 0x20001 = "
       "{b16:1,b16:2}; mov.b64 0x4000300020001 = {b16:1,b16:2,b16:3,b16:4}"},
      {"cvta", "u64 u32", decode_cvta,
       "to or from generic addresses of global, const, shared, local, param",
       "test: generic addressing"},
      {"ld", "b/s/u 8-64, f32 f64, v2 v4", decode_ld,
       "loads, extending narrow types; hints are accepted",
       "test: loads and stores"},
      {"st", "b/s/u 8-64, f32 f64, v2 v4", decode_st, "stores the low bytes",
       "test: loads and stores"},
      {"atom", "b/s/u 32 64, f32 f64", decode_atom,
       "add min max and or xor exch cas inc dec; d = old value",
       "test: atomics"},
      {"red", "b/s/u 32 64, f32 f64", decode_red, "atom without its result", "test: atomics"},
      {"prefetch", "", decode_nothing, "a hint", "test: hints"},
      {"membar", "", decode_nothing, "accepted: warps of a block run one at a time", "test: hints"},
      {"fence", "", decode_fence,
       "proxy.async: what follows may use shared memory asynchronously; mbarrier_init: so may copies "
       "use mbarriers; others as membar",
       "test: fences"},
      {"mbarrier", "init inval arrive arrive_drop expect_tx complete_tx test_wait try_wait b64",
       decode_mbarrier,
       "barriers in shared memory: phases, counts of arrivals and bytes; try_wait waits",
       "test: a ring"},
      {"nanosleep", "", decode_nothing, "accepted: time is not modelled", "test: hints"},
      {"createpolicy", "b64", decode_createpolicy, "a policy without effect", "test: hints"},
      {"cp", "async .ca .cg, 4 8 16 bytes; async.mbarrier; async.bulk, .tensor", decode_cp,
       "a copy to shared memory, zeros beyond the source size; groups and waits, arrivals at "
       "mbarriers; bulk copies of bytes and of boxes of tensors; the policy of .L2::cache_hint must be one of createpolicy",
       "test: asynchronous copies"},
      {"mma", "m16n8k16, m16n8k8; f16 or bf16, f32", decode_mma,
       "D = A B + C: products and their sum in ascending k in fp64, rounded once",
       "test: matrix products"},
      {"ldmatrix", "m8n8 x1 x2 x4 .trans b16", decode_ldmatrix,
       "8 x 8 matrices, a row at each lane's address",
       "test: matrix loads"},
      {"stmatrix", "m8n8 x1 x2 x4 .trans b16", decode_stmatrix, "ldmatrix, but it stores",
       "test: matrix stores"},
      {"wgmma", "mma_async m64nNk16, f16 or bf16, f32; fence commit_group wait_group", decode_wgmma,
       "D = A B + D as mma, asynchronous, of a warpgroup; A in registers or shared memory",
       "test: warpgroup products"},
      {"setmaxnreg", "inc dec u32", decode_setmaxnreg,
       "takes registers from the block's pool, waiting for them, or returns them",
       "test: register counts"},
      {"shfl", "sync up down bfly idx b32", decode_shfl, "a of another lane, p: it is in range",
       "test: shuffles"},
      {"vote", "sync all any uni ballot", decode_vote, "predicates of the members", "test: votes"},
      {"redux", "sync add min max and or xor u32 s32 b32", decode_redux, "over the members",
       "test: reductions"},
      {"elect", "sync", decode_elect, "p: the lane is the lowest of the members; d: which one that is",
       "test: elections"},
      {"activemask", "b32", decode_activemask, "the lanes that run this together",
       "test: active mask"},
      {"bra", "", decode_bra, "to a label", "test: divergence"},
      {"brx", "idx", decode_brx, "to a label of a table", "test: branch tables"},
      {"ret", "", decode_exit, "the thread ends", "test: divergence"},
      {"exit", "", decode_exit, "the thread ends", "test: exits"},
      {"trap", "", decode_trap, "a fault", "test: trap"},
      {"griddepcontrol", "wait launch_dependents", decode_griddepcontrol,
       "waits for the kernel before, if the launch overlaps it; the other is a hint",
       "test: overlapping launches"},
      {"bar", "sync arrive red, warp.sync", decode_bar,
       "waits for threads of the block; for lanes of the warp",
       "test: barriers"},
      {"barrier", "sync arrive red, .aligned", decode_bar, "as bar; lanes of a warp may come apart",
       "test: barriers"},
  };
  return rows;
}
// clang-format on

const OpcodeRow* find_opcode(std::string_view name) {
  for (const OpcodeRow& row : opcode_table())
    if (row.name == name) return &row;
  return nullptr;
}

}  // namespace fajit::emulator
