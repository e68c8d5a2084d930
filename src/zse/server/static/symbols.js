/* TeX's names and what they stand for in Unicode. */

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));

/** Letters: set in italics where they are lower case. */
export const LETTERS = pairs(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ omicron=ο pi=π
  varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π
  Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω ell=ℓ hbar=ℏ imath=ı jmath=ȷ Re=ℜ Im=ℑ wp=℘ aleph=ℵ beth=ℶ infty=∞ partial=∂ nabla=∇ emptyset=∅
  varnothing=∅ angle=∠ triangle=△ square=□ Box=□ diamond=⋄ top=⊤ bot=⊥ dagger=† ddagger=‡ degree=° prime=′ ldots=… dots=… dotsc=… cdots=⋯
  dotsb=⋯ vdots=⋮ ddots=⋱ checkmark=✓ clubsuit=♣ heartsuit=♥ spadesuit=♠ diamondsuit=♦ flat=♭ natural=♮ sharp=♯ S=§ P=¶ copyright=©
  pounds=£ euro=€ forall=∀ exists=∃ nexists=∄ eth=ð mho=℧ backslash=\\`);

/** Operators and relations. */
export const OPERATORS = pairs(`
  times=× div=÷ pm=± mp=∓ cdot=⋅ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ oslash=⊘ odot=⊙ cap=∩ cup=∪ uplus=⊎ sqcap=⊓ sqcup=⊔
  vee=∨ lor=∨ wedge=∧ land=∧ setminus=∖ smallsetminus=∖ wr=≀ neg=¬ lnot=¬ le=≤ leq=≤ leqslant=⩽ ge=≥ geq=≥ geqslant=⩾ ne=≠ neq=≠ ll=≪ gg=≫
  equiv=≡ sim=∼ simeq=≃ approx=≈ cong=≅ doteq=≐ propto=∝ asymp=≍ prec=≺ succ=≻ preceq=⪯ succeq=⪰ in=∈ ni=∋ notin=∉ subset=⊂ supset=⊃
  subseteq=⊆ supseteq=⊇ subsetneq=⊊ supsetneq=⊋ sqsubseteq=⊑ sqsupseteq=⊒ mid=∣ nmid=∤ parallel=∥ perp=⊥ vdash=⊢ dashv=⊣ models=⊨ vDash=⊨
  to=→ rightarrow=→ leftarrow=← gets=← uparrow=↑ downarrow=↓ updownarrow=↕ leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Uparrow=⇑ Downarrow=⇓
  Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺ longrightarrow=⟶ longleftarrow=⟵ longleftrightarrow=⟷ Longrightarrow=⟹ Longleftarrow=⟸
  mapsto=↦ longmapsto=⟼ hookrightarrow=↪ hookleftarrow=↩ rightharpoonup=⇀ rightharpoondown=⇁ leftharpoonup=↼ rightleftharpoons=⇌ nearrow=↗
  searrow=↘ swarrow=↙ nwarrow=↖ leadsto=⇝ therefore=∴ because=∵ colon=: coloneqq=≔ triangleq=≜ bowtie=⋈ ltimes=⋉ rtimes=⋊ gtrsim=≳
  lesssim=≲ lessgtr=≶ amalg=⨿ nsubseteq=⊈`);

/** Operators whose limits stand below and above in a formula of its own line. */
export const LARGE = pairs(`
  sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigvee=⋁ bigwedge=⋀ bigoplus=⨁ bigotimes=⨂ bigodot=⨀ biguplus=⨄ bigsqcup=⨆`);
export const INTEGRALS = pairs("int=∫ iint=∬ iiint=∭ oint=∮");

export const FENCES = pairs(`
  lbrace={ rbrace=} lbrack=[ rbrack=] langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| vert=| lVert=‖ rVert=‖ Vert=‖ |=‖
  {={ }=} lgroup=⟮ rgroup=⟯ ulcorner=⌜ urcorner=⌝`);

export const FUNCTIONS = new Set(
  "arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan tanh arsinh artanh".split(" "),
);
export const LIMITS = {
  lim: "lim", limsup: "lim sup", liminf: "lim inf", max: "max", min: "min", sup: "sup", inf: "inf", det: "det", gcd: "gcd", Pr: "Pr",
  argmax: "arg max", argmin: "arg min",
};
export const ACCENTS = pairs(`
  hat=^ widehat=^ tilde=~ widetilde=~ bar=¯ overline=¯ vec=→ overrightarrow=→ overleftarrow=← dot=˙ ddot=¨ check=ˇ breve=˘ acute=´ grave=\`
  mathring=˚ overbrace=⏞`);
export const UNDER = pairs("underline=_ underbrace=⏟");

/** Spaces, in em. */
export const SPACES = { ",": 0.167, ":": 0.222, ">": 0.222, ";": 0.278, "!": -0.167, " ": 0.25, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.167 };

/** Where the alphabets of Unicode's block of mathematical letters begin: capitals, small letters, digits; 0: there are none. Letters that
    older blocks have already. */
export const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce],
  boldsymbol: [0x1d468, 0x1d482, 0x1d7ce],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8],
  mathcal: [0x1d49c, 0x1d4b6, 0],
  mathscr: [0x1d49c, 0x1d4b6, 0],
  mathfrak: [0x1d504, 0x1d51e, 0],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
};
export const OLDER = {
  mathbb: pairs("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ"),
  mathcal: pairs("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"),
  mathfrak: pairs("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ"),
};
OLDER.mathscr = OLDER.mathcal;
